"""The rows of the table of checks, one module a subject. A rule is ``(parsed, context) -> findings``."""
