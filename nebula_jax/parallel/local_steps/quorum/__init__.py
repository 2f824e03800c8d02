"""Rounds that go on without clusters that are late or gone: a hub and its leaves."""
