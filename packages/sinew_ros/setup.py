"""Package metadata, for colcon (ament_python) and for pip. Both tools run this file."""

from pathlib import Path

from setuptools import setup

NAME = "sinew_ros"

setup(
    name=NAME,
    version="0.1.0",
    description="A Sinew policy on a robot of ROS 2 topics",
    long_description=Path("README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=[NAME],
    python_requires=">=3.8",
    install_requires=["setuptools", "numpy>=1.21", "pyyaml>=5.3", "sinew-vla-client==0.1.0"],
    extras_require={"dds": ["cyclonedds>=0.10.5"], "bag": ["rosbags>=0.10"]},
    data_files=[
        ("share/ament_index/resource_index/packages", [f"resource/{NAME}"]),
        (f"share/{NAME}", ["package.xml"]),
        (f"share/{NAME}/launch", ["launch/policy.launch.py"]),
        (f"share/{NAME}/config", sorted(map(str, Path("config").iterdir()))),
    ],
    zip_safe=True,
    entry_points={"console_scripts": ["sinew-ros = sinew_ros.__main__:main"]},
)
