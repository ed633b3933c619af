"""The cases. Each is a module with `async def run(settings) -> Report`, named in `cli.CASES`."""
