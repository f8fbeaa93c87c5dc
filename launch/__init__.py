"""What torchrun starts: programs on top of the library."""
