"""Client of the engines: sends sampling and scoring requests, retries them, and parses the completions."""
