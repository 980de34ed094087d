"""The `khot` command, its demo, and the papers' experiments: one file each."""
