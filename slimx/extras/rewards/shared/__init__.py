"""Code that several reward hooks share: boxed answers, mathematical notation, verification, requests to servers."""
