"""Quality of texts and limits of speculation: pure functions. Must not know about models or serving."""
