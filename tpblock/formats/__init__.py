"""The files that hold weights: Hugging Face folders, sharded folders, Meta's consolidated files, and the copying between them."""
