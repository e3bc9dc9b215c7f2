import json, os, statistics as st, sys, time
import torch
from fusedstep import optim
out={}
def shapes():
    d=768; s=[(50257,d),(1024,d)]
    for _ in range(12): s+= [(d,),(d,),(3*d,d),(3*d,),(d,d),(d,),(d,),(d,),(4*d,d),(4*d,),(d,4*d),(d,)]
    return s+[(d,),(d,)]
def make(device,dtype,kind,cls=optim.AdamW,**kw):
    ps=[torch.nn.Parameter(torch.randn(s,device=device).to(dtype)) for s in shapes()]
    for p in ps: p.grad=torch.randn_like(p)*1e-3
    if kind=="torch": return torch.optim.AdamW(ps,fused=True)
    return cls(ps,state_dtype=kind,fused=True,**kw)
def gpu(o,n=30):
    for _ in range(3): o.step()
    ts=[]
    for _ in range(n):
        a,b=torch.cuda.Event(True),torch.cuda.Event(True)
        torch.cuda.synchronize(); a.record(); o.step(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b))
    return st.median(ts)
def cpu(o,n=15):
    for _ in range(2): o.step()
    ts=[]
    for _ in range(n):
        t=time.perf_counter(); o.step(); ts.append((time.perf_counter()-t)*1e3)
    return st.median(ts)
n=sum(torch.Size(s).numel() for s in shapes()); out["elements"]=n
for dev,timer in (("cpu",cpu),("cuda",gpu)):
    for dtype in (torch.float32,torch.bfloat16):
        for kind in (None,"torch","int8","int4","fp8"):
            if kind=="torch" and dtype is not torch.float32: continue
            o=make(dev,dtype,kind); out[f"{dev} {dtype} {kind}"]=timer(o); del o
    if dev=="cuda":
        torch.cuda.empty_cache()
        # limit: same bytes: 16 B an element, 8 read... copy of 8n bytes in, 8n out
        for b in (16,28):
            x=torch.empty(n*b//8,dtype=torch.float32,device=dev); y=torch.empty_like(x)
            ts=[]
            for _ in range(30):
                a,c=torch.cuda.Event(True),torch.cuda.Event(True); torch.cuda.synchronize(); a.record(); y.copy_(x); c.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(c))
            out[f"cuda copy of {b} B an element"]=st.median(ts); del x,y
print(json.dumps(out,indent=1)); 
if os.environ.get("OUT"): json.dump(out,open(os.environ["OUT"]+"/times.json","w"),indent=1)
