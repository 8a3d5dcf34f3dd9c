"""All keys of the configuration with their types, defaults, descriptions and names in other frameworks: `slimx keys`,
completions in a shell, and the page docs/configuration.md."""
