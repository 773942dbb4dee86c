"""Tables that map the name (tag) of a step in a bundle to the step's class.

A new step needs its own file and one line in this module.
"""

from __future__ import annotations

IMAGE = {
    "resize": "sinew.steps.image.resize:Resize",
    "centre_crop": "sinew.steps.image.centre_crop:CentreCrop",
    "jpeg": "sinew.steps.image.jpeg:Jpeg",
    "square": "sinew.steps.image.square:Square",
    "short_side": "sinew.steps.image.short_side:ShortSide",
    "long_side": "sinew.steps.image.long_side:LongSide",
    "crop": "sinew.steps.image.crop:Crop",
    "grid": "sinew.steps.image.grid:Grid",
    "letterbox": "sinew.steps.image.letterbox:Letterbox",
    "scales": "sinew.steps.image.scales:Scales",
    "corner": "sinew.steps.image.corner:Corner",
}
VECTOR = {
    "affine": "sinew.steps.vector.affine:Affine",
    "linear_to_angle": "sinew.steps.vector.linear_to_angle:LinearToAngle",
    "add_state": "sinew.steps.vector.add_state:AddState",
    "compose_pose": "sinew.steps.vector.compose_pose:ComposePose",
    "threshold": "sinew.steps.vector.threshold:Threshold",
    "reach": "sinew.steps.vector.reach:Reach",
    "one_of": "sinew.steps.vector.one_of:OneOf",
    "bounds": "sinew.steps.vector.bounds:ValueBounds",
}
PROMPT = {
    "clean": "sinew.steps.prompt.clean:Clean",
    "strip": "sinew.steps.prompt.strip:Strip",
    "lower": "sinew.steps.prompt.lower:Lower",
    "words_only": "sinew.steps.prompt.words_only:InstructionPrompt",
    "task": "sinew.steps.prompt.task:TaskPrompt",
    "as_list": "sinew.steps.prompt.as_list:AsList",
    "advantage": "sinew.steps.prompt.advantage:Advantage",
    "text": "sinew.steps.prompt.text:Text",
    "instruction": "sinew.steps.prompt.instruction:Instruction",
    "state": "sinew.steps.prompt.state:State",
    "state_tokens": "sinew.steps.prompt.state_tokens:StateTokens",
    "image": "sinew.steps.prompt.image:Image",
    "suffix": "sinew.steps.prompt.suffix:Suffix",
    "drop": "sinew.steps.prompt.drop:Drop",
    "last": "sinew.steps.prompt.last:Last",
    "fill": "sinew.steps.prompt.fill:Fill",
    "only_for": "sinew.steps.prompt.only_for:OnlyFor",
    "marker": "sinew.steps.prompt.marker:Marker",
    "without": "sinew.steps.prompt.without:Without",
}
ACTION_TOKENS = {
    "bins": "sinew.steps.action_tokens.bins:BinTokens",
    "fast": "sinew.steps.action_tokens.fast:FastTokens",
}
