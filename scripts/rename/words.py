"""Commands and flags of section 3, over a tree. Idempotent."""
import re, sys, subprocess
from pathlib import Path
root=Path(sys.argv[1])
files=subprocess.run(['git','-C',str(root),'ls-files'],capture_output=True,text=True).stdout.split('\n')
subs=[
 (r'\bftrun snapshots\b', 'ftrun checkpoints'),
 (r'\bftrun check\b(?!points)', 'ftrun preflight'),
 (r'\bftrun render\b', 'ftrun manifest'),
 (r'("-m", "ftrun", )"snapshots"', r'\1"checkpoints"'),
 (r'("-m", "ftrun", )"check"', r'\1"preflight"'),
 (r'("-m", "ftrun", )"render"', r'\1"manifest"'),
 (r'-m ftrun check\b', '-m ftrun preflight'),
 (r'--orphan(?![-\w])', '--orphan-timeout'),
 (r'--pause-limit\b', '--pause-timeout'),
 (r'\["render", "slurm"', '["manifest", "slurm"'),
 (r'FTRUN_KEPT_FDS', 'FTRUN_RETAINED_FDS'),
]
for f in files:
    if not f or not f.endswith(('.py','.md','.yaml','.toml','demo','.html','.svg')) or f=='CHANGELOG.md': continue
    p=root/f
    if not p.exists(): continue
    s=p.read_text(); o=s
    for a,b in subs: s=re.sub(a,b,s)
    if s!=o: p.write_text(s); print(f)
subs=[
 (r'memory creeping','memory growth'),(r'MEMORY_CREEPING','MEMORY_GROWTH'),(r'memory-creeping','memory-growth'),(r'\bcreeping\]\(#memory-growth\)','growth](#memory-growth)'),
 (r'(contain|hold|to|from before the) bad numbers', r'\1 numerical anomalies'),
 (r'hangs, bad numbers, slowness', 'hangs, numerical anomalies, slowness'),(r'and bad numbers spread','and anomalies spread'),
 (r'(["\'`(\[| ])bad numbers', r'\1numerical anomaly'),
 (r'#bad-numbers','#numerical-anomaly'),
 (r'\bBAD_NUMBERS\b','NUMERICAL_ANOMALY'),(r'\b_BAD_NUMBERS\b','_NUMERICAL_ANOMALY'),(r'\bBAD_NUMBERS_STEP\b','NUMERICAL_ANOMALY_STEP'),
 (r'\b_bad_numbers\b','_numerics_policy'),(r'bad_numbers','numerical_anomalies'),(r'^## bad numbers','## numerical anomaly'),(r'Bad numbers','Numerical anomaly'),
]
for f in files:
    if not f or not f.endswith(('.py','.md','.yaml','.toml','demo','.html','.svg')) or f=='CHANGELOG.md': continue
    p=root/f
    if not p.exists(): continue
    s=p.read_text(); o=s
    for a,b in subs: s=re.sub(a,b,s,flags=re.M)
    if s!=o: p.write_text(s); print(f)
