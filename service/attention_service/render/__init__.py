"""Heatmaps of attention: from a request to a picture, as SVG or PNG.

picture = make_picture(spec, plan, options, backend)   # numbers in bins, labels, what is hidden and why
drawing = layout(picture, options)                     # boxes, lines and texts with their places
to_svg(drawing, theme), to_png(drawing, theme)
"""
