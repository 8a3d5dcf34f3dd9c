"""Advantages, losses and KL estimators: pure functions of tensors."""
