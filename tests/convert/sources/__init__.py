"""Tests of the sources of policies, such as files and the Hugging Face Hub."""
