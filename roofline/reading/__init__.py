"""How is what people give read, and refused in one sentence?"""
