"""What decides and sets a patch. Imports no upstream and no torch."""
