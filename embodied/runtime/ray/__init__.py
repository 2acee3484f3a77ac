"""Runtime on Ray: env workers, actor servers and the learner in processes of one machine or many (docs/scaling.md).

RayRuntime (runtime.py)   main thread; imports Ray when it is built
Controller                thread of the tickets and of supervision
Creator, hosts            the parts as actors; Collective: several learners in the place of one
Publisher, PulledWeights  weights through the object store
Cluster                   an existing cluster, or one of the run's own on the loopback interface
"""
