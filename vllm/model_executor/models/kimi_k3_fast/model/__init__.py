"""The standard path: Kimi K3's text model in plain PyTorch as a vLLM model, and the checkpoint format it reads."""
