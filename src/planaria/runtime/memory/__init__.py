"""State taken apart, captured in host buffers, and kept by peers."""
