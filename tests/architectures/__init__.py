"""What people train: architectures of transformers, built from configurations, against eager."""
