"""The membership of a federation: who belongs to it, by which certificate."""
