import tokenize,sys,collections,pathlib,re,subprocess,keyword,io
root=pathlib.Path(sys.argv[1])
files=subprocess.run(['git','ls-files','*.py'],cwd=root,capture_output=True,text=True).stdout.split()
ids=collections.Counter(); where=collections.defaultdict(set)
words=collections.Counter(); wid=collections.defaultdict(collections.Counter)
for f in files:
    for t in tokenize.generate_tokens(io.StringIO((root/f).read_text()).readline):
        if t.type==tokenize.NAME and not keyword.iskeyword(t.string):
            ids[t.string]+=1; where[t.string].add(f)
for i,c in ids.items():
    for w in re.findall(r'[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+',i):
        w=w.lower(); words[w]+=c; wid[w][i]+=c
if sys.argv[2:]==['words']:
    for w,c in words.most_common():
        print(c,w,len(wid[w]),' '.join(f'{i}:{n}' for i,n in wid[w].most_common(6)),sep='\t')
else:
    for i,c in ids.most_common(): print(c,i,len(where[i]),sorted(where[i])[0],sep='\t')
