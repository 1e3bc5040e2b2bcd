"""Commands of the command line, one module each; they import the modules that they need when they run."""
