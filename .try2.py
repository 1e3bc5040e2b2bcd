import numpy as np, ml_dtypes, sys, re
sys.path.insert(0,'/tmp/w/values')
from tests.test_compare_values import facts_of, reference_and_baseline, make_question, Decoded, backends
R=np.random.default_rng(int(sys.argv[1]))
n=said=bad=0; other=0
for t in range(150):
    dt=[np.float32,np.float16,ml_dtypes.bfloat16][R.integers(3)]
    k=int(R.integers(3,140)); g=int(R.integers(1,3)); G=int(R.integers(1,4)); q=int(R.choice([1,2,5,k,k])); e=int(R.choice([4,16,40])); causal=bool(R.integers(2)) and q==k
    Q=(R.choice([1,1,4])*R.standard_normal((1,g*G,q,16))).astype(dt);K,V=(R.standard_normal((1,g,k,x)).astype(dt) for x in (16,e))
    s=Q.astype('f8')@K.astype('f8').repeat(G,1).swapaxes(-1,-2)/4
    if causal: s[...,np.triu(np.ones((q,k),bool),1)]=-np.inf
    w=np.exp(s-s.max(-1,keepdims=True)); w/=w.sum(-1,keepdims=True)
    j=np.arange(k); M=int(2**R.integers(0,7)); a=int(R.integers(M)); b=int(R.integers(a,M))+1
    S=(j%M>=a)&(j%M<b); kind=R.integers(4)
    V8=V.astype('f8').copy(); x=int(R.integers(1,17))
    if kind==0: n_=np.where(S&((j^x)<k),j^x,j); V8=V8[:,:,n_]
    elif kind==1: V8=V8*~S[:,None]
    elif kind==2: n_=np.where(S&(j+x<k),j+x,j); V8=V8[:,:,n_]
    elif kind==3:  # weights wrong instead
        w=w*(1+0.3*R.random(w.shape))
    out=(w@V8.repeat(G,1)).astype(dt)
    qn=make_question(Decoded({"query":Q,"key":K,"value":V,"layout":"bhld","is_causal":causal,"actual":{"output":out}},frozenset()))
    fs=[f for f in facts_of(reference_and_baseline(qn,backends().choose("numpy","cpu"))) ]
    ov=[f for f in fs if f.name=="other_values"]
    n+=kind!=3
    if ov:
        said+=1
        m=ov[0].message
        if kind==3: bad+=1; print("BAD",dt.__name__,k,q,e,m)
        words={0:f"XOR {x}",1:"adds nothing",2:f"j{x:+d}"}.get(kind,"?")
        if words not in m: print("DIFF",kind,x,M,a,b,dt.__name__,"k",k,"q",q,"e",e,causal,m)
        keys=[int(v) for v in ov[0].numbers["keys"]]; eff=[int(v) for v in j[S]][:16]
        if keys!=eff: other+=1; print("KEYS",kind,x,(M,a,b),dt.__name__,"k",k,"q",q,"e",e,causal,"|",m[60:])
    elif kind!=3 and fs: pass
print(n,"planted",said,"said",bad,"bad",other,"other keys")
