"""An agent as a user of openai-agents writes it."""

import sys
from pathlib import Path

from agents import Agent, Runner, function_tool


@function_tool
def write_file(path: str, content: str) -> str:
    """Write a text file.

    Args:
        path: Where, below the working directory.
        content: The whole text.
    """
    Path(path).write_text(content)
    return "written"


agent = Agent(name="writer", instructions="Do the task with the tools that you have.", tools=[write_file])
print(Runner.run_sync(agent, sys.argv[1]).final_output)
