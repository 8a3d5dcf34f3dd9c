"""Delivery of packed buckets from the trainers to the engines."""
