"""Objectives and their evaluation: next-token and masked-token prediction."""
