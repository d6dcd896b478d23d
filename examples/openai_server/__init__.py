"""An OpenAI-compatible server whose generations are watched, and stopped, by probes in its own process."""
