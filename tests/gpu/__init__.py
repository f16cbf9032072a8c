"""What only a GPU can check, on one of them: `make gpu`."""
