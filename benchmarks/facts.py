"""Facts for `recall.py`: things people say in a chat, and questions about them.

`LITERAL` asks with the words of the statement; there are ten facts of each kind, which differ in
one name and the answer alone. `PARAPHRASED` asks in other words, as somebody does who no longer
knows how it was put; no question was changed for what is found with it.
"""

_PLACES = (
    "Aldern",
    "Brook",
    "Corran",
    "Dunmore",
    "Elsby",
    "Farrow",
    "Glenn",
    "Harlow",
    "Irvin",
    "Jura",
)
_PEOPLE = (
    "Agnes",
    "Boris",
    "Clara",
    "Dmitri",
    "Elena",
    "Felix",
    "Greta",
    "Hamid",
    "Ingrid",
    "Jorge",
)
_KINDS = (
    (
        "The door code of the {place} archive is {n}.",
        "What is the door code of the {place} archive?",
    ),
    (
        "The ferry to {place} leaves from pier {n}.",
        "From which pier does the ferry to {place} leave?",
    ),
    ("{person} is allergic to compound {n}.", "To which compound is {person} allergic?"),
    ("{person}'s locker at the gym is number {n}.", "What number is {person}'s locker at the gym?"),
    ("The tower in {place} was built in {n}.", "When was the tower in {place} built?"),
    (
        "The server for {place} listens on port {n}.",
        "On which port does the server for {place} listen?",
    ),
    (
        "{person} paid {n} crowns for the old piano.",
        "How many crowns did {person} pay for the old piano?",
    ),
    (
        "Invoice {n} is the one for the {place} bridge.",
        "Which invoice is the one for the {place} bridge?",
    ),
    ("{person} was born in the winter of {n}.", "In the winter of which year was {person} born?"),
    ("The well at {place} is {n} metres deep.", "How many metres deep is the well at {place}?"),
)

LITERAL = [
    tuple(
        text.format(place=_PLACES[i], person=_PEOPLE[i], n=1000 + 97 * (10 * kind + i) % 9000)
        for text in texts
    )
    for kind, texts in enumerate(_KINDS)
    for i in range(10)
]
"""Statement and question."""

_PARAPHRASED = """
My sister Tilda repairs violins for a living.|What is Tilda's job?
We buried the spare key under the blue flowerpot.|Where did we hide the extra key to the house?
The dentist moved my appointment to the ninth of May.|When do I have to see the tooth doctor?
I can't stand coriander, it tastes like soap to me.|Which herb do I dislike?
Our landlord is called Mr. Pemberton.|Who owns the flat we rent?
The car's brakes were replaced in Leipzig.|In which town did the vehicle get repaired?
My passport expires in August of next year.|Until when is my travel document valid?
The wifi password is on the back of the router.|How do I get onto the wireless network?
Grandma taught me to bake rye bread.|Who showed me how to make a loaf?
I proposed to Nadia on top of the Zugspitze.|On which mountain did I ask Nadia to marry me?
The cat had to have two teeth pulled.|What did the vet do to our pet?
My first computer was an Amiga with half a megabyte.|What machine did I begin programming on?
The thesis is due on the third of October.|What is the deadline for handing in my dissertation?
Our neighbour keeps bees on the roof.|Who has hives in our building?
I broke my left wrist skating on the canal.|Which bone did I fracture on the ice?
The choir rehearses on Wednesday evenings.|On what day do we practise singing?
Uncle Rolf left me his stamp collection.|What did I inherit from Rolf?
The boiler makes a knocking noise since the storm.|What is wrong with the heating?
I want the walls of the nursery painted mint green.|Which colour did I choose for the baby's room?
The train to Gdansk takes eleven hours.|How long is the railway journey to Gdansk?
My boss wants the budget cut by twelve percent.|How much should we save, according to my manager?
We called the puppy Biscuit.|What is the name of our young dog?
The marathon starts at the harbour gate.|Where do the runners set off?
I drink my coffee with oat milk.|What do I put into my espresso?
The museum lends audio guides for free on Sundays.|When can one borrow a headset without paying?
Our wedding song was by Nina Simone.|To whose music did we have our first dance?
The gardener said the pear tree has rust.|Which disease does the fruit tree suffer from?
I lost my umbrella on the number fourteen tram.|Where did I leave the thing against rain?
The lawyer charges ninety euros for a letter.|What does legal advice cost me?
My blood group is AB negative.|What type of blood do I have?
The conference hotel is called the Grand Meridian.|Where am I staying during the meeting?
Pavel's restaurant closes on Mondays.|On which day can one not eat at Pavel's?
The old bakery became a bicycle shop.|What was the cycle store formerly?
I am reading a biography of Marie Curie.|Which scientist's life is my current book about?
The tent weighs under two kilograms.|How heavy is our camping shelter?
My phone fell into the fountain at the mall.|How did my mobile get wet?
The plumber comes on Thursday between two and four.|When will the leak be repaired?
Our team lost the final by a single penalty.|How did the championship end for us?
The recipe needs three hundred grams of almonds.|How many nuts do I have to buy for the cake?
I was born in a taxi on the way to hospital.|Under what circumstances did my mother give birth?
The piano teacher has retired to Madeira.|Where does my former music instructor live now?
We pay the babysitter fifteen an hour.|What is the wage for looking after the children?
The cellar floods whenever the river rises.|Which room gets wet at high water?
My favourite film is the one about the lighthouse keepers.|Which movie do I love most?
The parcel was delivered to the pharmacy by mistake.|Who received my package wrongly?
I owe Katrin four hundred for the concert tickets.|How much money do I have to give back to Katrin?
The insurance does not cover hail.|What kind of weather damage are we not protected against?
Our daughter is learning to play the bassoon.|Which instrument does our child play?
The elevator inspector found a cracked cable.|What defect did the lift have?
I keep the receipts in a shoebox on the wardrobe.|Where are my proofs of purchase?
The new intern speaks fluent Portuguese.|Which language does the trainee know?
The bakery's sourdough starter is called Gertrude.|What nickname did they give to the yeast culture?
Lightning struck the oak behind the school.|What happened to the tree near the classroom?
I sold my motorbike to a priest.|Who bought the motorcycle from me?
The river path is closed because of nesting herons.|Why can't we walk along the water?
My doctor told me to eat less salt.|What should I avoid for the sake of my health?
The choir trip goes to Ljubljana in June.|Which city will the singers visit in summer?
We met at a bus stop in the rain in Cork.|How did the two of us get to know each other?
The spare tyre is flat as well.|What is wrong with the replacement wheel?
The rent goes up by sixty from January.|How much more will the apartment cost in the new year?
My brother is allergic to wasps.|Which insect is dangerous for my sibling?
The library fined me for a book about octopuses.|Why did I have to pay the librarians?
The printer only works when the window is open.|What odd condition does the office machine need?
I planted tulips along the fence in November.|Which flowers did I put in the ground in autumn?
The novel ends with the sinking of the lighthouse ship.|What happens in the story's last chapter?
Our flight to Oslo was cancelled because of fog.|Why did the plane to Norway not take off?
The choirmaster wears odd socks on purpose.|What is peculiar about the conductor's clothes?
My grandfather was a lamplighter in Prague.|What did my ancestor do for work?
The old laptop's password is the name of my goldfish.|How can I log in to the ageing notebook?
The cheese with the walnuts comes from Savoy.|From which region is the dairy product with nuts?
I gave the red bicycle to my nephew.|Who got my two-wheeler?
The electrician found mice in the fuse box.|Which animals were in the wiring?
The concert hall burned down in 1911.|Which year did the fire destroy the music venue?
My headache started after the new glasses.|What caused the pain in my head?
The shop on the corner sells second-hand records.|Where can I buy used vinyl?
We adopted the kitten from a farm near Bruges.|Where does our young cat come from?
The sofa does not fit through the stairwell.|Why can the couch not be brought upstairs?
I voted against the car park.|What was my opinion on building places for vehicles?
The swimming lessons cost eighty for ten weeks.|What is the fee for the course in the pool?
The meeting with the auditors is in the glass room.|Where will we see those who check our accounts?
My aunt smuggled chocolate in her accordion.|What did my relative hide in a musical instrument?
The moon landing was on when my father was born.|What was on television at dad's birth?
The wine from Jakob's vineyard won a silver medal.|Which prize did Jakob's grapes bring in?
The stairs creak on the seventh step.|Where exactly does walking up make a noise?
I write with a fountain pen filled with violet ink.|Which colour is my handwriting?
The glacier hike needs crampons and a guide.|What equipment is required for the tour on the ice?
My roommate works nights at the observatory.|Where is the person I live with employed?
The goat ate the contract.|Why do we no longer have the signed agreement?
The ballet starts at half past seven.|At what hour does the dance performance begin?
Our water is too hard for the kettle.|Why does limescale build up when boiling?
I hid the birthday present in the piano stool.|Where is the gift concealed?
The vaccine has to be repeated after ten years.|When do I need the next jab?
Mina wants to become a deep-sea welder.|Which profession does Mina dream of?
The old mill has been turned into a climbing gym.|What is the former flour works used for?
The bus driver always hums Verdi.|Which composer does the man at the wheel like?
The fence must not be taller than one metre twenty.|What maximum height is allowed for the barrier?
The bread knife is in the dishwasher.|Where is the blade for slicing loaves?
I was stung by a jellyfish in Crete.|What injured me during the Greek holiday?
The microphone picks up the fridge.|Why is there a hum on the recording?
The castle tour is only offered in Hungarian.|In which language is the fortress shown to visitors?
"""

PARAPHRASED = [tuple(line.split("|")) for line in _PARAPHRASED.strip().splitlines()]
"""Statement and question."""
