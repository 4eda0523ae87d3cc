"""What a push is made of: what is asked, its steps, its confirmation, and what joins the pushes to several hosts."""
