"""One file a patch. Each holds one `PATCH`."""
