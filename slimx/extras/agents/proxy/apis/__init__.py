"""The APIs that agents use: each module parses requests, and writes responses and errors in the API's format."""
