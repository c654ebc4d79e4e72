"""A store on disk: publications of others, kept as they came and published again (decision 15).

Pure, or plain files: ``records``, ``terms``, ``shelf``, ``stock``, ``archive``, ``images``.
Shell: ``depot``, ``gallery``, ``loading``, ``handler``, ``keeping``, ``following``, ``daemon``.
"""
