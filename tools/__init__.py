"""Command-line tools of the repository; none of them is imported by slimx."""
