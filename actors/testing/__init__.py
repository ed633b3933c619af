"""Help for tests of actors: seeded simulation, probes, traces, faults."""

from ._faults import Fault as Fault
from ._faults import FaultPlan as FaultPlan
from ._probes import NoProbes as NoProbes
from ._probes import Probe as Probe
from ._probes import Probes as Probes
from ._simulate import simulate as simulate
from ._trace import Step as Step
from ._trace import Trace as Trace

__all__ = ["Fault", "FaultPlan", "NoProbes", "Probe", "Probes", "Step", "Trace", "simulate"]
