"""What all operators share: arguments, precision, dispatch, and rows, whole or spread over processes."""
