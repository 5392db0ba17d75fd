"""Kimi K3 at low latency: an overlay on stock vLLM 0.32.0. `docs/architecture.md` shows the rooms."""
