"""The registered operators, one file each: schema, shape rule, autograd rule, vjp and jvp."""
