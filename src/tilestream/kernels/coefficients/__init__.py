"""Regression coefficients of kernels: fitted to their times on an H200, and no numbers of hardware.

Each says which script fitted it to which kernels, and which of a device's numbers it moves with on other devices.
"""
