"""The command line: `precondattn list`, `explain`, `conformance`, `bench`, `new-backend`."""
