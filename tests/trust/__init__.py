"""Seeded defects: forwards that a graph cannot stand for, and whether anybody says so."""
