"""The slimx plugin that runs inside SGLang's processes: hooks, model classes, and the receiver of published weights."""
