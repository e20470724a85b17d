"""How does a result read in a terminal?"""
