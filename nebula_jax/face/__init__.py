"""The face: what `import nebula_jax as nebula` shows, built on the rooms below it."""
