"""Advantage estimators: formulas for one group, and their application to a step."""
