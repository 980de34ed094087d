"""What every operator shares: arguments, precision, dispatch, rows that are here or spread over processes."""
