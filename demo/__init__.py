"""The demo: long documents, asked about over HTTP, come back from RAM and from disk."""
