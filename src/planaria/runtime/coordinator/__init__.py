"""The coordinator: membership behind gRPC, with journal, summary and status."""
