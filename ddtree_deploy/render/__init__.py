"""What the user sees: events, results and errors as tables and progress bars, plain lines, or JSON."""
