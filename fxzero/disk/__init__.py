"""What lives on disk: scratch files, their chunks, and the way of a chunk to the host and back."""
