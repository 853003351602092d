"""Gated activation with bounded inputs."""
