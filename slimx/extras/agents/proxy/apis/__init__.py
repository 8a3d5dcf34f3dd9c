"""The APIs that agents speak: each reads its requests, and writes its answers and errors."""
