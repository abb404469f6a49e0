"""Sending the blocks of one model to many machines: schedules and the choice between them. Pure."""
